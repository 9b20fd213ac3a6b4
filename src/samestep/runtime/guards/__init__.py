"""Checks during a run: each question has one mechanism, and what it finds is refused on all ranks by one path (`refusals.py`).

`step_guards.py` is the chief: the one observer of a run's steps, which calls the others. *watched*: steps 1, 2, 4, 8, ... of a
split batch and every `train.watch_every`-th (its head draws them).

| question | mechanism | when | what it costs |
| --- | --- | --- | --- |
| does a micro-batch run again give the same, and each of its halves? | `canary.py`, by `repeat.py` | watched steps | those of the loss, or else two forwards of a micro-batch, one if the batch is not split, and one of a pair; about 5 all_reduces of 8 bytes; 9 forwards more after a deviation |
| does padding count? | `canary.py`, by `repeat.py` | watched steps, samples of two sizes | 3 forwards of one or two samples and their losses |
| is an update repeated alike? | `update_replay.py` | every `watch_every`-th step | the update of one weight of at most 4 Mi elements, copied |
| how far may roundings go? | `independence/roundings.py` | after a deviation | 8 forwards, whenever it exceeds what was measured before |
| is the loss a sum over samples, over tokens? | `loss_of_parts.py`, on `divided_samples.py` and `evaluated_loss.py`, by `repeat.py` | until samples show it, whenever the loss runs what it had not, and in watched steps | three forwards of a micro-batch at most, some calls of the loss on at most 4 Mi elements |
| does it reach weights by the outputs alone? | `loss_trials.py` | when the loss is tried | a walk along the graph of one loss |
| by what is a loss divided that the forward returns? | `forward_loss.py`, by `repeat.py` | before the first step, in watched steps, and when it ends otherwise | 3 to 10 forwards of up to three samples, and 6 of up to four micro-batches |
| is a sample the same whenever it is read? | `named_samples.py` | the first step | 8 samples read twice, 4 of them once more, two digests from each rank |
| does the user's code communicate by itself? | `loss_trials.py` | until the loss is tried | a look at the caller for each call of torch.distributed |
| who draws random numbers? | `randomness.py` | around all forwards and backwards of a step, and around its update | 41 us each; another forward under hooks to name the module |
| what has the loop thawed or put into training mode, and which hooks has it registered? | `outside_changes.py` | before every step | a look at each frozen weight and module; with several replicas 16 elements of each tensor |
| do ranks hold equal values? | `drift.py` | every `watch_every`-th step, several ranks | every weight read once, an all_reduce of a few hundred bytes a tensor |
| which module made a value that is not finite? | `nonfinite.py` | after such a step | its forwards and backwards once more under hooks |
| is a loss far above the last ones? | `unusual_steps.py` | every step, with `numerics.on_spike` | nothing |
| is a bad step skipped, and how often? | `unusual_steps.py` | after such a step | nothing |
| do kernels give the same bits? does attention run by the kernel of the job? | `chosen_kernels.py` | with `numerics.deterministic`, `run.attention` | slower kernels; none |
"""
