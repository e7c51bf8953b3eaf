"""A whole topology in one thread, under a virtual clock, with seeded faults: one seed is one run.

    scenario.py    what a seed draws: the shape of the topology, the load, the faults
    clock.py       virtual time, and the trace of a run
    network.py     the channels: the shipped in-process ones, and their outboxes
    node.py        an actor's shell: what all do alike
    core_nodes.py, client_node.py, worker_node.py: around the shipped cores, by kind
    supervisor.py  the supervisor's shell around the shipped Lifecycle
    users.py       those who send requests, read slowly and abort
    wire.py        what may be said: every message is held against the protocol
    reference.py   what a request's answer must be
    world.py       one run, from start to exit, and what must hold after it
    mutations.py   mistakes to put into the cores, each of which has to be found

A topology has one to four replicas; what hits one of them must not be felt by the others' requests.

Real are: all cores, the ledger, the life cycle, the process graph, every message's bytes, the
channels with their capacities, cursors and marks of death. Imitated are the event loops and the
processes: a node does one thing at a time, stops for a while between any two of its effects, and
can die there.
"""
