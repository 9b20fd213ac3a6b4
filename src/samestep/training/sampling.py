"""Text sampled from the model of a run, one token at a time, before and after training."""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.datasets import open_tokenizer
from samestep.runtime.run import Run


def sample_text(run: Run, prompt: str, num_tokens: int, temperature: float) -> str | None:
    """Sample `num_tokens` tokens after `prompt`; every call draws the same numbers.

    Returns:
        The text, prompt included; None where the model gives no logits [batch, sequence, vocabulary].
    """
    tokenizer = open_tokenizer(run.job)
    tokens = tokenizer.encode(prompt) or [tokenizer.end_id or 0]
    found = sample_tokens(run, tokens, num_tokens, temperature, run.job.train.seed)
    return None if found is None else tokenizer.decode(tokens + found)


def sample_tokens(run: Run, given: list[int], num_tokens: int, temperature: float, seed: int) -> list[int] | None:
    """Sample `num_tokens` tokens after those that are given; every call with one seed draws the same numbers.

    Where no rank holds all weights, the call is collective over the world: every rank must make it, since the forward
    gathers weights and passes activations; if one rank does not, the others wait for it.

    Returns:
        The sampled tokens; None where the model gives no logits [batch, sequence, vocabulary].
    """
    tokens, most = list(given), open_tokenizer(run.job).vocab_size
    generator = torch.Generator().manual_seed(seed)
    window = run.job.data.sequence_length
    # Sequence parallelism divides the tokens evenly among the ranks of tp. What fills up stands behind the last token,
    # where no position of a causal model sees it.
    multiple = run.layout.tp if run.layout.sequence_parallel else 1
    for _ in range(num_tokens):
        seen = tokens[-window:]
        filled = seen + seen[-1:] * (-len(seen) % multiple)
        outputs = run.outputs({"input_ids": torch.tensor([filled])})
        found = getattr(outputs, "logits", outputs)
        if not isinstance(found, Tensor) or found.dim() != 3:
            return None
        # A model may have more embeddings than the tokenizer has tokens: those are never sampled.
        logits = found[0, len(seen) - 1, :most].double().cpu()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        chances = torch.softmax(logits / temperature, dim=-1).nan_to_num(1.0)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return tokens[len(given) :]


def printable(text: str) -> str:
    """Replace every control character: an untrained model may write escape sequences that a terminal obeys."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
