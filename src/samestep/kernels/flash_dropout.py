"""Attention with hashed dropout as kernels of Triton: no scores, weights or mask of all pairs of tokens are in memory.

A program has the rows of one head and passes over the blocks of the others, as in FlashAttention (Dao et al. 2022, arXiv:2205.14135;
Dao 2023, arXiv:2307.08691); each block draws its part of the mask anew from the hashes of its rows and columns.

    forward          a block of queries, over keys      O = (P * D) V, L = log sum exp S     with a running maximum
    of queries       a block of queries, over keys      dS = P (dP - delta),  dQ = scale dS K
    of keys          a block of keys, over the heads    dV = (P * D)' dO,  dK = scale dS' Q
                     that share it and their queries

There are no atomic additions, so repetitions have equal bits. Products are of the dtype that is given, sums in float32.

Legend: B samples, A heads, K heads of keys, L queries, S keys, D features of a head, E features of a value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samestep.kernels.hashed_dropout import element_bits

_RUNTIME = ("num_queries", "num_keys", "query_start", "key_start", "threshold")


@triton.jit
def _block(num_tokens, num_heads, SIZE: tl.constexpr):
    """Return the first token of this program's block, its sample and its head."""
    num_blocks = tl.cdiv(num_tokens, SIZE)
    which = tl.program_id(0) // num_blocks
    return tl.program_id(0) % num_blocks * SIZE, (which // num_heads).to(tl.int64), (which % num_heads).to(tl.int64)


@triton.jit
def _tile(base, rows, num_rows, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Return some rows of a matrix, with zeros where there are none."""
    features = tl.arange(0, PADDED)
    is_there = (rows < num_rows)[:, None] & (features < WIDTH)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * stride + features[None, :], mask=is_there, other=0.0)


@triton.jit
def _put(base, values, rows, num_rows, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Write some rows of a matrix."""
    features = tl.arange(0, PADDED)
    is_there = (rows < num_rows)[:, None] & (features < WIDTH)[None, :]
    tl.store(base + rows.to(tl.int64)[:, None] * stride + features[None, :], values, mask=is_there)


@triton.jit
def _end_of_keys(last, distance, num_keys, IS_CAUSAL: tl.constexpr):
    """Return where the keys end that queries up to `last` may see; query i is key i + distance."""
    end = num_keys
    if IS_CAUSAL:
        end = tl.minimum(num_keys, last + distance + 1)
    return end


@triton.jit
def _begin_of_queries(first, distance, IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Return the block of queries from which on they may see keys from `first` on."""
    begin = first * 0
    if IS_CAUSAL:
        begin = tl.maximum(first - distance, 0) // BLOCK * BLOCK
    return begin


@triton.jit
def _scores(
    q,
    k,
    rows,
    columns,
    num_queries,
    num_keys,
    query_start,
    key_start,
    scale,
    mask,
    mask_row,
    mask_column,
    documents,
    IS_CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the scores of a block, -inf for pairs that do not see each other."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    is_pair = (rows < num_queries)[:, None] & (columns < num_keys)[None, :]
    is_seen = is_pair
    ahead = (rows + query_start)[:, None] - (columns + key_start)[None, :]
    if IS_CAUSAL:
        is_seen = is_seen & (ahead >= 0)
    if MASK != "":
        at = mask + rows.to(tl.int64)[:, None] * mask_row + columns.to(tl.int64)[None, :] * mask_column
        if MASK == "bool":
            is_seen = is_seen & (tl.load(at, mask=is_pair, other=0) != 0)
        else:
            scores = scores + tl.load(at, mask=is_pair, other=0.0).to(tl.float32)
    if HAS_DOCUMENTS:
        documents_of_rows = tl.load(documents + query_start + rows, mask=rows < num_queries, other=-1)
        documents_of_columns = tl.load(documents + key_start + columns, mask=columns < num_keys, other=-1)
        is_seen = is_seen & (documents_of_rows[:, None] == documents_of_columns[None, :])
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def _drop(first, second, hashed_columns, columns, num_keys, threshold):
    """Return which weights of a block are dropped."""
    hashes = tl.load(hashed_columns + columns, mask=columns < num_keys, other=0)
    return element_bits(first[:, None], second[:, None], hashes[None, :]) < threshold


@triton.jit
def _halves(halves, rows, num_queries):
    """Return the halves of the hashes of some rows."""
    at = halves + rows.to(tl.int64) * 2
    return tl.load(at, mask=rows < num_queries, other=0), tl.load(at + 1, mask=rows < num_queries, other=0)


@triton.jit(do_not_specialize=_RUNTIME)
def forward_kernel(
    q, k, v, out, lse, halves, hashed_columns, mask, documents,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, halves_b, halves_h, mask_b, mask_h, mask_t, mask_s, documents_b,
    num_queries, num_keys, query_start, key_start, scale, times, threshold,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASK: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output [.., L, E] and log-sum-exps [B, A, L] of a block of queries."""
    row, sample, head = _block(num_queries, HEADS, ROWS)
    rows = row + tl.arange(0, ROWS)
    queries = _tile(q + sample * q_b + head * q_h, rows, num_queries, q_t, D, PADDED_D)
    first, second = _halves(halves + sample * halves_b + head * halves_h, rows, num_queries)
    k += sample * k_b + head // GROUP * k_h
    v += sample * v_b + head // GROUP * v_h
    mask += sample * mask_b + head * mask_h
    documents += sample * documents_b
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED_E], tl.float32)
    for start in range(0, _end_of_keys(row + ROWS - 1, query_start - key_start, num_keys, IS_CAUSAL), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        keys = _tile(k, columns, num_keys, k_t, D, PADDED_D)
        scores = _scores(
            queries, keys, rows, columns, num_queries, num_keys, query_start, key_start, scale,
            mask, mask_t, mask_s, documents, IS_CAUSAL, MASK, HAS_DOCUMENTS, PRECISION,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - finite[:, None])
        shrunk = tl.exp(top - finite)
        total = total * shrunk + tl.sum(weights, 1)
        weights = tl.where(_drop(first, second, hashed_columns, columns, num_keys, threshold), 0.0, weights)
        values = _tile(v, columns, num_keys, v_t, E, PADDED_E)
        sums = sums * shrunk[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        top = higher
    is_blind = top == float("-inf")
    sums = sums * (times / tl.where(is_blind, 1.0, total))[:, None]
    _put(out + sample * o_b + head * o_h, sums, rows, num_queries, o_t, E, PADDED_E)
    log_sum_exps = tl.where(is_blind, float("-inf"), top + tl.log(tl.where(is_blind, 1.0, total)))
    tl.store(lse + (sample * HEADS + head) * num_queries + rows, log_sum_exps, mask=rows < num_queries)


@triton.jit
def products_kernel(
    gradient, out, delta, g_b, g_h, g_t, o_b, o_h, o_t, num_queries,
    HEADS: tl.constexpr, E: tl.constexpr, PADDED_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the sums over features of gradient times output [B, A, L] for a block of queries."""
    row, sample, head = _block(num_queries, HEADS, ROWS)
    rows = row + tl.arange(0, ROWS)
    gradients = _tile(gradient + sample * g_b + head * g_h, rows, num_queries, g_t, E, PADDED_E).to(tl.float32)
    outputs = _tile(out + sample * o_b + head * o_h, rows, num_queries, o_t, E, PADDED_E).to(tl.float32)
    at = delta + (sample * HEADS + head) * num_queries + rows
    tl.store(at, tl.sum(gradients * outputs, 1), mask=rows < num_queries)


@triton.jit
def _sums_of_rows(lse, delta, at, rows, num_queries):
    """Return the log-sum-exps of some queries, and the sums of their gradients times their outputs."""
    is_row = rows < num_queries
    return tl.load(lse + at + rows, mask=is_row, other=0.0), tl.load(delta + at + rows, mask=is_row, other=0.0)


@triton.jit
def _gradient_of_scores(
    queries, keys, values, gradients, log_sum_exp, delta, first, second, hashed_columns, rows, columns,
    num_queries, num_keys, query_start, key_start, scale, times, threshold, mask, mask_row, mask_column, documents,
    IS_CAUSAL: tl.constexpr, MASK: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the weights of a block that are kept, times 1 / (1 - p), and the gradient of its scores."""
    scores = _scores(
        queries, keys, rows, columns, num_queries, num_keys, query_start, key_start, scale,
        mask, mask_row, mask_column, documents, IS_CAUSAL, MASK, HAS_DOCUMENTS, PRECISION,
    )  # fmt: skip
    finite = tl.where(log_sum_exp == float("-inf"), 0.0, log_sum_exp)
    weights = tl.exp(scores - finite[:, None])
    drop = _drop(first, second, hashed_columns, columns, num_keys, threshold)
    of_weights = tl.dot(gradients, tl.trans(values), input_precision=PRECISION) * times
    of_scores = weights * (tl.where(drop, 0.0, of_weights) - delta[:, None])
    return tl.where(drop, 0.0, weights * times), of_scores


@triton.jit(do_not_specialize=_RUNTIME)
def query_gradients_kernel(
    q, k, v, gradient, lse, delta, dq, halves, hashed_columns, mask, documents,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, l_b, l_h, dq_b, dq_h, dq_t,
    halves_b, halves_h, mask_b, mask_h, mask_t, mask_s, documents_b,
    num_queries, num_keys, query_start, key_start, scale, times, threshold,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASK: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of queries."""
    row, sample, head = _block(num_queries, HEADS, ROWS)
    rows = row + tl.arange(0, ROWS)
    queries = _tile(q + sample * q_b + head * q_h, rows, num_queries, q_t, D, PADDED_D)
    gradients = _tile(gradient + sample * g_b + head * g_h, rows, num_queries, g_t, E, PADDED_E)
    log_sum_exp, products = _sums_of_rows(lse, delta, sample * l_b + head * l_h, rows, num_queries)
    first, second = _halves(halves + sample * halves_b + head * halves_h, rows, num_queries)
    k += sample * k_b + head // GROUP * k_h
    v += sample * v_b + head // GROUP * v_h
    mask += sample * mask_b + head * mask_h
    documents += sample * documents_b
    sums = tl.zeros([ROWS, PADDED_D], tl.float32)
    for start in range(0, _end_of_keys(row + ROWS - 1, query_start - key_start, num_keys, IS_CAUSAL), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        keys = _tile(k, columns, num_keys, k_t, D, PADDED_D)
        values = _tile(v, columns, num_keys, v_t, E, PADDED_E)
        _, of_scores = _gradient_of_scores(
            queries, keys, values, gradients, log_sum_exp, products, first, second, hashed_columns, rows, columns,
            num_queries, num_keys, query_start, key_start, scale, times, threshold, mask, mask_t, mask_s, documents,
            IS_CAUSAL, MASK, HAS_DOCUMENTS, PRECISION,
        )  # fmt: skip
        sums += tl.dot(of_scores.to(keys.dtype), keys, input_precision=PRECISION)
    _put(dq + sample * dq_b + head * dq_h, sums * scale, rows, num_queries, dq_t, D, PADDED_D)


@triton.jit(do_not_specialize=_RUNTIME)
def key_gradients_kernel(
    q, k, v, gradient, lse, delta, dk, dv, halves, hashed_columns, mask, documents,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, l_b, l_h, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    halves_b, halves_h, mask_b, mask_h, mask_t, mask_s, documents_b,
    num_queries, num_keys, query_start, key_start, scale, times, threshold,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASK: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and of its values."""
    column, sample, shared = _block(num_keys, HEADS // GROUP, COLUMNS)
    columns = column + tl.arange(0, COLUMNS)
    keys = _tile(k + sample * k_b + shared * k_h, columns, num_keys, k_t, D, PADDED_D)
    values = _tile(v + sample * v_b + shared * v_h, columns, num_keys, v_t, E, PADDED_E)
    documents += sample * documents_b
    of_keys = tl.zeros([COLUMNS, PADDED_D], tl.float32)
    of_values = tl.zeros([COLUMNS, PADDED_E], tl.float32)
    begin = _begin_of_queries(column, query_start - key_start, IS_CAUSAL, ROWS)
    for each in range(GROUP):
        head = shared * GROUP + each
        for start in range(begin, num_queries, ROWS):
            rows = start + tl.arange(0, ROWS)
            queries = _tile(q + sample * q_b + head * q_h, rows, num_queries, q_t, D, PADDED_D)
            gradients = _tile(gradient + sample * g_b + head * g_h, rows, num_queries, g_t, E, PADDED_E)
            log_sum_exp, products = _sums_of_rows(lse, delta, sample * l_b + head * l_h, rows, num_queries)
            first, second = _halves(halves + sample * halves_b + head * halves_h, rows, num_queries)
            weights, of_scores = _gradient_of_scores(
                queries, keys, values, gradients, log_sum_exp, products, first, second, hashed_columns, rows, columns,
                num_queries, num_keys, query_start, key_start, scale, times, threshold,
                mask + sample * mask_b + head * mask_h, mask_t, mask_s, documents,
                IS_CAUSAL, MASK, HAS_DOCUMENTS, PRECISION,
            )  # fmt: skip
            of_values += tl.dot(tl.trans(weights.to(gradients.dtype)), gradients, input_precision=PRECISION)
            of_keys += tl.dot(tl.trans(of_scores.to(queries.dtype)), queries, input_precision=PRECISION)
    _put(dk + sample * dk_b + shared * dk_h, of_keys * scale, columns, num_keys, dk_t, D, PADDED_D)
    _put(dv + sample * dv_b + shared * dv_h, of_values, columns, num_keys, dv_t, E, PADDED_E)
