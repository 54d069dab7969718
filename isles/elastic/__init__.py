"""Islands that come and go, joined by an object store alone.

    numbering    the rounds of all fragments as one sequence 1, 2, 3 ...
    objects      what is in the store: names, contents, digests, strict parsing
    requests     store operations in flight: retries with back-off, no threads
    protocol     one island: a state machine over store answers, the clock of its training loop, and time
    faults       what can go wrong in the simulator, drawn from one seed
    simulator    many islands, a store and a clock in one process
    invariants   what must hold after every operation
    command      `isles simulate`

Read them in this order. Nothing here knows a real store or a real clock: threads and a store client around `protocol`
make it a world.
"""
