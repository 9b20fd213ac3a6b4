"""A trace: one forward on the meta device, recorded as data that analyses and costs read.

## What runs
The model has shapes and no values. `ForwardTracer` (`forward.py`), a dispatch mode, runs each operation, and `FlowRecorder` (`flow_recorder.py`), a function
mode, sees each function outside of modules. Attention runs as one fused operation. Whole numbers keep their values (`meta_tensors.py`), so that code
which looks at positions or lengths takes the branch that it would really take; where code looks at other values, `looks.py` notes which, and what it was
answered.

## What is recorded
A storage has a number, its address, and stays alive while the trace lives (`operations.Storages`). A view is a storage, an offset, sizes and strides, so an
operation that only makes views says nothing.

    ForwardCalls     calls of modules: region, first input and output, shapes, points among checkpoints        module_inputs.py
    Events           work of operations, saved tensors, exchanges of attentions, batch norms, writes           operations.py
    Recorder         operations with their views, hooks and custom Functions                                   operations.py
    Flow             values that pass between calls and functions of the model's own code                      flow.py
    TracedPlaces     what is kept for the backward, in which checkpoint                                        checkpointed.py
    Backward         operations of the backward, and storages of the gradients of weights                      backward.py

An `Analysis` receives the same events in their order, and follows what it asks for (`independence/`).

## What follows from the records
A region r is the operations from one call of a top-most module with weights to the next. With size s(k) of a storage k in elements, and n traced samples:

    FLOPs of r              the sum of 2 rows inner columns of its products                                    costs.py
    output of a layer       the sum of s(k) / n over the k that its regions make and others read, or the model returns
    saved by a layer        the sum of s(k) / n over the k that autograd keeps there first
    working memory          the maximum over operations of the backward of s(made and not yet freed) - s(freed of what was kept)
    moved                   the elements that operations read and write, and what fused groups spare of them
    crossing at a boundary  the values with maker < boundary <= last reader, weights left out                  stage_events.py

Layers are runs of regions (`arranged_layers.py`): blocks, and what stands between them. `trace.py` puts all of it into a `ModelSpec`.
"""
