"""The scheduler: decides when and where every job runs. Pure: no I/O and no clock.

scheduler.py   the state machine: events in, commands out
state.py       settings, jobs, cards and workers as the schedule knows them
ledger.py      the run's clock, commands, rows and timers
pool.py        the cards of one kind of accelerator, and their failures
queues.py      jobs that wait, and jobs that wait for other jobs
placement.py   which job gets which cards
leases.py      card sets in the hands of attempts; starts and stops workers
repeats.py     jobs that a search holds back, and rows that are measured again
outcomes.py    what follows from the end of an attempt, and the end of the run
retry.py       what each class of failure means; the circuit breaker
batch_size.py  searches for the largest batch size that fits, and the fastest
deadline.py    what goes first, and what is given up, before a deadline
estimator.py   how long a job will take, from earlier rows
simulator.py   the same schedule on a virtual cluster; simulated_faults.py draws what goes wrong
invariants.py  checks every command of simulations and tests
"""
