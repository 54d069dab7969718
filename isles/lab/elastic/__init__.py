"""Islands that come and go, in the laboratory: real processes on shaped links around a store, and what befalls them.

server     the store: moto's S3 server, with errors by seed
disk       a folder on a disk that can be filled up
island     what runs on a machine: `isles train --store` at a pace, and a witness of its rounds
fleet      machines, store and islands of one run, and everything that can be done to them
faults     kill, stop, link down, store down ...: each once, by seed
figures    what a fault cost, from events and seals
run        one run: undisturbed, under faults, in churn
matrix     all faults, one table
command    `isles lab --store`
"""
