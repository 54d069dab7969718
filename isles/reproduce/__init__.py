"""The papers' findings on one machine: `isles reproduce NAME`.

A *study* is a few dozen training runs and what they say about a claim. From the bottom up:

    job.py        what defines one training run, and the text it runs on
    probes.py     what a study may look at inside a run
    train.py      a job becomes a record: one run, all islands in this process
    pool.py       many jobs, one per core, each in a process of its own; what is finished is kept
    scale.py      how large: quick (seconds, for tests), cpu (the default), paper (for GPUs)
    study.py      claim, configurations, findings, figure
    studies/      one file per study
    results.py    results/NAME.json
    document.py   docs/reproduction.md out of them
    speed.py      which way of running islands is the fastest on this machine
    command.py    the command
"""
