"""Changes that a loop makes between two steps to the model and the optimizer of a run, which would change what a layout has planned.

What was frozen when the layout was planned has no gradient in it; what the loop freezes afterwards, it may thaw again
(`used_weights.py`). Modules that the loop puts into evaluation mode stay in it, on all ranks alike. One that was in evaluation mode from
the start, such as a frozen batch norm, was planned so.
"""

from __future__ import annotations

import operator

from torch import nn

from samestep.runtime.assembly import Assembly
from samestep.runtime.weights import parameter_hooks

_NONE, _IN_TRAINING = frozenset[str](), operator.itemgetter("training")


class OutsideChanges:
    """The state of a run's module as it was before the first step."""

    def __init__(self, assembly: Assembly) -> None:
        frozen = {param.name for param in assembly.model.spec.params if not param.trainable}
        self._params = [*assembly.model.module.named_parameters()]
        """The parameters themselves: a module may hold a stand-in of one that other ranks have updated ([Note: late weights])."""
        self._judged_hooks: dict[int, object] = {}
        self._reads_hooks = parameter_hooks.may_refuse(assembly.parallel.program)
        self._judges_hooks = self._reads_hooks or assembly.parallel.program.step.layout.pp > 1
        self._num_hooks = -1
        self.has_hooks = False
        """Whether hooks of the loop's see the gradients of whole steps, which they may act by."""
        self._frozen = [(name, param) for name, param in self._params if name in frozen]
        modes = assembly.model.training_modes
        self._trained = [(path, part) for path, part in assembly.model.module.named_modules() if modes.get(part)]
        # What torch.compile returns has no mode of its own: that of its module is looked at.
        self._modes = [vars(part) for _, part in self._trained if "training" in vars(part)]
        self._evaluated = [
            (path, part)
            for path, part in assembly.model.module.named_modules()
            if modes.get(part) is False and _reads_mode(part)
        ]

    def refusal(self, assembly: Assembly) -> str:
        """Return why the next step would not be that of a plain loop; empty if nothing shows it."""
        thawed = [(name, param) for name, param in self._frozen if param.requires_grad]
        # The step is refused at its end, on all ranks, and gathers nothing for these gradients.
        for _, param in thawed:
            param.requires_grad_(False)
        if thawed:
            return _thawed_refusal(thawed[0][0])
        if self._judges_hooks and (
            reason := parameter_hooks.later_refusal(self._params, assembly.parallel.program, self._judged_hooks)
        ):
            return reason
        if not self._reads_hooks and (number := parameter_hooks.num_on(self._params)) != self._num_hooks:
            self._num_hooks, self.has_hooks = number, parameter_hooks.are_on(self._params)
        for path, part in self._evaluated:
            if part.training:
                return (
                    f"{path} was in evaluation mode when the run was made, which the layout relies on, and it is in training "
                    f"mode now. Build it in training mode, and call eval() of it in run.model until then"
                )
        return assembly.weights.updater.rates.refusal()

    def evaluated_paths(self) -> frozenset[str]:
        """Return the paths of the modules that the loop has put into evaluation mode."""
        if all(map(_IN_TRAINING, self._modes)):
            return _NONE
        return frozenset([path for path, part in self._trained if not part.training])


def _reads_mode(module: nn.Module) -> bool:
    """Return whether the forward of a module's class acts by its mode, as that of a batch norm or a dropout does."""
    code = getattr(type(module).forward, "__code__", None)
    return code is None or "training" in code.co_names


def _thawed_refusal(name: str) -> str:
    return (
        f"{name} was frozen when the run was made, and now requires a gradient, which no part of the layout computes. Build it "
        "trainable, and freeze it in run.model until then"
    )
