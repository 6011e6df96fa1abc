"""The schedule: decides when and where every job runs. Pure: no I/O and no clock.

schedule.py    the state machine: events in, commands out
record.py      settings, and what is known of each job
needs.py       jobs that may not start before others have succeeded
shares.py      which open cards go to gangs, and which to narrower jobs
pending.py     jobs that wait, by width and residency key, longest first
cards.py       nodes, cards and workers; what is open and what is reserved
leases.py      who holds which cards; starts and stops workers
assignment.py  which job gets which cards
pool.py        the four above, for one kind of accelerator
ledger.py      rows, pauses, and which jobs have ended
verdicts.py    what follows from the end of an attempt
breaker.py     stops a run in which everything fails at once
retry.py       what each class of failure means for a job and its cards
estimate.py    how long a job will take, from earlier rows
batch_search.py  the largest batch that fits
simulate.py    the same schedule on a virtual cluster (virtual_cluster.py) with faults
               (virtual_chance.py); invariants.py checks every command
"""
