"""One training step, layer by layer: when a gradient is there, and when a weight is needed.

The papers' graph of a step has 4L - 1 nodes for L layers: for each layer a forward, a backward for the activations
(not for the first layer: nobody needs the gradient of the data), a backward for the parameters, and a reduction.
The three kinds of compute take a third of the step each, spread evenly over the layers that have them:

    forward      layer 0, 1, ... L-1
    backward     layer L-1: activations, parameters; layer L-2: ...; layer 0: parameters

Compute on an island is one line of nodes, so all that matters of it are two positions per layer, as fractions of the
step: where its forward begins (its weights are needed) and where its parameter backward ends (its gradient is there).
"""

from __future__ import annotations


def forward_start(layer: int, layers: int) -> float:
    """Where in the step the forward pass of a layer begins.

    >>> forward_start(0, 4), forward_start(3, 4)
    (0.0, 0.25)
    """
    return layer / (3 * layers)


def backward_end(layer: int, layers: int) -> float:
    """Where in the step the gradient of a layer's parameters is complete; the first layer's comes last.

    >>> backward_end(0, 4), round(backward_end(3, 4), 4)
    (1.0, 0.5278)
    """
    if layer == 0:
        return 1.0
    done = layers - layer  # layers whose backward is over, this one included
    return 1 / 3 + done / (3 * (layers - 1)) + done / (3 * layers)
