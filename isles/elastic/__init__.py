"""Islands that come and go, joined by an object store alone.

    numbering    the rounds of all fragments as one sequence 1, 2, 3 ...
    objects      what is in the store: names, contents, digests, strict reading
    requests     store operations in flight: retries with back-off, no threads
    log          the seals that an island has read, and whom they name
    snapshots    writing, finding and loading them; what may be deleted
    decisions    what the protocol tells the engine
    protocol     one island: a state machine over store answers, the clock of its training loop, and time

    store        the store client: a bucket, a folder, or memory; HMAC; the probe
    driver       threads around the protocol
    lateness     how late payloads come that are left out
    robust       bounds on what one bad island can do
    layout       where the parts of several ranks are in an island's payload; parts of a snapshot
    session      an island's life in a run: between the training loop and the protocol
    world        `isles.StoreWorld`, for the engine
    ranks        what the ranks of one island say to each other
    lock_step    islands of several ranks: the first one is the member, the others follow

    toy          a model with exact arithmetic
    faults       what can go wrong, drawn from one seed
    invariants   what must hold after every operation
    simulator    many islands, a store and a clock in one process
    command      `isles simulate`

Read them in this order. Down to `protocol` nothing knows a real store or a real clock.
"""
