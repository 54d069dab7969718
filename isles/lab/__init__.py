"""The laboratory: islands on real, slow links, in Linux network namespaces of one machine.

    namespaces   a machine of the laboratory: network, processes and host name of its own
    network      islands joined by a bridge; counters, links that go down and come back
    shaping      the shape of a link: bandwidth, latency, loss
    transfer     a transfer before the run: does the link carry what it should
    nodes        torchrun in every namespace, as a user would start it on several machines
    programs     what runs there: `isles train`, or `timed` (and `timed_model`), whose compute is a sleep
    reference    the same steps without communication, for utilisation
    figures      utilisation and bytes, from event log and counters
    prediction   what the planner says about the same run
    run          all of it together: one run, one record
    cells        methods x bandwidths
    sweep, figure    all of them, as a table and as a picture
    elastic      islands that come and go around a store: kills, outages, joins (`isles lab --store`)
    command      `isles lab`

Read them in this order. `Network` is of use by itself, in a test or a notebook:

    with Network(islands=2, bandwidth=20e6) as network:
        network.start(0, ["ping", "-c", "3", network.address(1)])
"""

from isles.lab.network import Network
from isles.lab.shaping import Shape

__all__ = ["Network", "Shape"]
