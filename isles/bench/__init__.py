"""What isles costs, as ratios measured side by side in one run: `isles bench`.

    codecs      encode and decode against memcpy of the same fp32 bytes
    engine      a training step with isles against the bare loop, and where the time goes
    islands     the same with two islands, which are two processes of this machine
    scaling     the cost of a round against the number of parameters, and of fragments
    memory      the most that lives on the device, against data-parallel training

Each is a module with a function `measure` that returns plain numbers. `targets` says which of them must hold,
`document` writes the page docs/performance.md, `command` is the command.
"""
