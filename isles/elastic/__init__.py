"""Islands that come and go, joined by an object store alone.

What is in the store, and how it is asked:

    numbering    the rounds of all fragments as one sequence 1, 2, 3 ...
    documents    small JSON documents, read strictly
    objects      names, contents and digests of all objects
    decisions    the protocol's settings, and what it tells the engine
    requests     store operations in flight: retries with back-off, put-if-absent

The protocol of one island, a state machine over store answers, the clock of its training loop, and time:

    log          the seals that it has read, and whom they name
    rounds       what it knows of the rounds that it has not applied
    looks        what it asks the store again and again
    snapshots    writing, finding and loading them; what may be deleted
    joining      run.json, and a number
    reader       replay: from the log to decisions
    clock        when its clock jumps
    protocol     a reader that takes part: sends, seals, leaves

Up to here nothing knows a real store or a real clock. The same protocol, for real:

    store        the store client: a bucket, a folder, or memory; HMAC; the probe
    driver       threads around the protocol
    lateness     how late payloads come that are left out
    robust       bounds on what one bad island can do
    layout       where the parts of several ranks are in an island's payload; parts of a snapshot
    session      an island's life in a run: between the training loop and the protocol
    world        `isles.StoreWorld`, for the engine
    ranks        what the ranks of one island say to each other
    lock_step    islands of several ranks: the first one, the root, is the member
    follower     the other ranks

And in a simulation:

    toy          a model with exact arithmetic
    faults       what can go wrong, drawn from one seed
    invariants   what must hold after every operation
    process      one simulated island
    simulator    many of them, a store and a clock in one process
    command      `isles simulate`
"""
