"""Errors that raise nothing: the usual way to do a thing gives other numbers, and a loss that looks right.

Each row names the tests that hold the right way and the deliberate faults that put the usual one into the runtime;
docs/reference/same-result.md prints them. What a fault changes is measured by `verify`, which `test_faults.py` holds.
"""

from __future__ import annotations

from dataclasses import dataclass

PARITY = "tests/parity/test_silent_errors.py::test_the_right_way_computes_what_one_device_computes"


@dataclass(frozen=True)
class Silent:
    """One silent error."""

    what: str
    right: str
    """How it is done here."""
    faults: tuple[str, ...] = ()
    loss: float | None = None
    """How far the first of the faults moves the loss of three steps, against 1 or the loss itself."""
    gradients: float | None = None
    """How far it moves a gradient, against that gradient's largest element."""
    tests: tuple[str, ...] = (PARITY,)


SILENT = (
    Silent(
        "A zero-bubble schedule reduces a bucket before the split-off weight gradients are in it",
        "A bucket is sent when the program's last task has filled it, be it a backward or a split-off weight gradient",
        ("split_off_weight_gradients_come_after_the_reduction", "split_off_weight_gradients_are_lost"),
        loss=0.000423,
        gradients=0.781,
    ),
    Silent(
        "Tied embeddings are cut over `tp` each for itself",
        "One parameter with two names is cut once, by vocabulary, and both uses give it their gradient",
        ("a_tied_head_is_cut_for_itself",),
        loss=0.0013,
        gradients=0.877,
    ),
    Silent(
        "Tied embeddings on the first and the last pipeline stage, each with a gradient of its own",
        "The gradient is summed over the two stages, and the norm of clipping counts it once",
        ("tied_weights_are_not_summed_across_stages", "tied_weights_are_counted_twice"),
        loss=0.000902,
        gradients=1.01,
    ),
    Silent(
        "Norms of heads (Qwen3): each `tp` rank uses the full weight on its own heads",
        "The forward on the meta device shows which unsharded weights meet sharded activations; their gradient is summed over `tp`",
        ("norms_of_heads_are_not_summed_over_tp",),
        loss=3.03e-07,
        gradients=1.23,
        tests=(PARITY, "tests/parity/test_silent_errors.py::test_whole_weights_on_cut_tensors_need_no_word_in_a_plan"),
    ),
    Silent(
        "Learned activations (Apertus) within layers that `tp` shards, missing in the family's own plan",
        "As for norms of heads: found in the forward, summed over `tp`",
        ("learned_activations_are_not_summed_over_tp",),
        loss=4.8e-09,
        gradients=3.14,
        tests=(PARITY, "tests/parity/test_silent_errors.py::test_learned_activations_are_summed_in_every_layout"),
    ),
    Silent(
        "Learned positions (GPT-2) that each rank of `sequence_parallel` adds to its own tokens",
        "The sequence is cut at the first block: the gradients of all tokens are gathered before the embeddings",
        ("positions_are_not_summed_under_sequence_parallel",),
        loss=0.0,
        gradients=1.0,
    ),
    Silent(
        "Later pipeline stages are fed as `inputs_embeds`, which the model scales once more (Gemma, Granite)",
        "The model's own forward runs on every stage, with stand-ins for the layers of others",
        ("the_embedding_scale_is_applied_on_every_stage",),
        loss=0.00204,
        gradients=0.966,
        tests=(PARITY, "tests/parity/test_axes.py::test_an_axis_computes_what_one_device_computes"),
    ),
    Silent(
        "The loss is a mean of the means of micro-batches or ranks, which count different numbers of tokens",
        "Sums of losses are added up, and divided once by the count of the whole step",
        ("gradients_are_mean_over_microbatches", "loss_is_mean_over_microbatches", "loss_is_mean_over_ranks"),
        loss=0.00321,
        gradients=0.923,
    ),
    Silent(
        "`to_empty` leaves garbage in buffers that no checkpoint holds, as rotary frequencies",
        "Buffers are made again by the code that made them, on each rank",
        ("rotary_frequencies_are_garbage",),
        loss=1.84e-08,
        gradients=0.0209,
        tests=(PARITY, "tests/unit/test_init.py::test_fill_rest_makes_buffers_and_attributes_and_leaves_parameters"),
    ),
    Silent(
        "Each rank resets its shard from the same seed: every shard gets the same numbers",
        "A weight's first value is a function of (seed, name); a rank draws it whole and keeps its rows",
        ("shards_draw_the_same_numbers", "ranks_draw_other_first_weights"),
        loss=1.11,
        gradients=58.6,
    ),
    Silent(
        "FSDP2 keeps gathered weights after the backward: the next step runs on weights from before the update",
        "The program names the backward pass that frees a unit, and the runtime frees it there",
        ("updated_weights_are_not_gathered",),
        loss=0.00221,
        gradients=0.887,
        tests=(PARITY, "tests/parity/test_axes.py::test_an_axis_computes_what_one_device_computes"),
    ),
    Silent(
        "Each pipeline stage has a loss scaler of its own: one takes a step that another skips",
        "An overflow on any rank makes the step's one sum of scalars infinite, so every rank decides alike",
        ("a_stage_skips_by_itself", "a_rank_skips_by_itself"),
        tests=(
            "tests/parity/test_precision.py::test_every_layout_skips_the_same_steps",
            "tests/crashes/test_nonfinite.py::test_an_overflow_on_one_rank_skips_the_step_on_all",
        ),
    ),
    Silent(
        "Batch norm under data parallelism normalizes with the statistics of a rank instead of the batch",
        "Statistics are taken over the groups in the job, across ranks; `verify` finds a batch norm in your own code",
        ("statistics_of_a_batch_are_those_of_the_rank",),
        loss=0.00547,
        gradients=1.64,
        tests=("tests/parity/test_batch_norm.py::test_layouts_compute_what_a_plain_loop_computes",),
    ),
    Silent(
        "Sums in less than float32: int8 wraps around, bfloat16 rounds away",
        "Gradients are cast to float32 before they are added or sent; the ledger of every layout is held to it",
        ("gradients_are_reduced_in_bfloat16",),
        tests=("tests/parity/test_precision.py::test_a_layout_deviates_by_roundings_alone",),
    ),
    Silent(
        "Ranks take part in one collective with other dtypes or sizes: gloo adds up the bytes it is given",
        "Every collective of a layout is the program's; the first watched step of a run compares the messages of all ranks",
        tests=("tests/crashes/test_watch.py::test_a_collective_with_different_things_is_named",),
    ),
    Silent(
        "A resumed run adds in another order: DDP rebuilds its buckets after the first backward",
        "Buckets are the program's, the same in every process; a resumed run is the same to the bit",
        tests=(
            "tests/parity/test_checkpoint.py::test_resuming_is_exact",
            "tests/parity/test_silent_errors.py::test_other_buckets_would_show_in_the_bits",
        ),
    ),
)
