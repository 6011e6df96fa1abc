"""Outputs of hl-smi that others recorded on real cards and published; nobody here has a card.

``GAUDI2_TABLE``: hl-smi 1.16.0 on a server of eight Gaudi2, one of them serving a model, from the
README of github.com/rajiv-sudo/gaudi-Llama2-7B-Inference, lines of four cards left out.
``GAUDI3_CSV``: hl-smi 1.24.1 on a server of eight Gaudi3, from the tests of a monitor in Go.
``GAUDI_CSV``: hl-smi 1.18.0 with ``csv,nounits`` on first-generation cards, from the tests of
github.com/2maz/slurm-monitor; ``GAUDI_TABLE`` is from there too, two processes having been written
into it by hand.
"""

GAUDI2_TABLE = """\
+-----------------------------------------------------------------------------+
| HL-SMI Version:                              hl-1.16.0-fw-50.1.2.0          |
| Driver Version:                                     1.16.0-94aac46          |
|-------------------------------+----------------------+----------------------+
| AIP  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | AIP-Util  Compute M. |
|===============================+======================+======================|
|   0  HL-225              N/A  | 0000:b3:00.0     N/A |                   0  |
| N/A   26C   N/A    82W / 600W |    768MiB / 98304MiB |     0%           N/A |
|-------------------------------+----------------------+----------------------+
|   6  HL-225              N/A  | 0000:43:00.0     N/A |                   0  |
| N/A   26C   N/A   101W / 600W |  27098MiB / 98304MiB |     0%           N/A |
|-------------------------------+----------------------+----------------------+
| Compute Processes:                                               AIP Memory |
|  AIP       PID   Type   Process name                             Usage      |
|=============================================================================|
|   0        N/A   N/A    N/A                                      N/A        |
|   1        N/A   N/A    N/A                                      N/A        |
|   5        N/A   N/A    N/A                                      N/A        |
|   6       618796     C   ray::ServeRepli                         26330MiB
|   7        N/A   N/A    N/A                                      N/A        |
+=============================================================================+
"""

GAUDI_TABLE = """\
| N/A   32C   N/A   100W / 350W |    512MiB / 32768MiB |    13%           N/A |
|-------------------------------+----------------------+----------------------+
| Compute Processes:                                               AIP Memory |
|  AIP       PID   Type   Process name                             Usage      |
|=============================================================================|
|   0        10    C      python name                              1024MiB    |
|   1        N/A   N/A    N/A                                      N/A        |
|   6        20    c      custom process                           2040MiB    |
|   7        N/A   N/A    N/A                                      N/A        |
+=============================================================================+
"""

GAUDI3_CSV = """\
index, name, bus_id, driver_version, uuid, module_id, memory.total [MiB], memory.free [MiB], \
memory.used [MiB]
0, HL-325L, 0000:3b:00.0, 1.24.1-b336d5e, 01P4-HL3090A0-18-UAN071-12-03-01, 1, 131072 MiB, \
130400 MiB, 672 MiB
1, HL-325L, 0000:4c:00.0, 1.24.1-b336d5e, 01P4-HL3090A0-18-UAN071-05-08-05, 3, 131072 MiB, \
130400 MiB, 672 MiB
2, HL-325L, 0000:5d:00.0, 1.24.1-b336d5e, 01P4-HL3090A0-18-UAS681-15-03-02, 2, 131072 MiB, \
130400 MiB, 672 MiB
3, HL-325L, 0000:9b:00.0, 1.24.1-b336d5e, 01P4-HL3090A0-18-UAN071-04-07-03, 6, 131072 MiB, \
130400 MiB, 672 MiB
4, HL-325L, 0000:19:00.0, 1.24.1-b336d5e, 01P4-HL3090A0-18-UAN071-08-07-01, 0, 131072 MiB, \
130400 MiB, 672 MiB
5, HL-325L, 0000:bb:00.0, 1.24.1-b336d5e, 01P4-HL3090A0-18-UAH066-20-03-04, 7, 131072 MiB, \
130400 MiB, 672 MiB
6, HL-325L, 0000:cb:00.0, 1.24.1-b336d5e, 01P4-HL3090A0-18-UAN075-04-06-07, 5, 131072 MiB, \
130400 MiB, 672 MiB
7, HL-325L, 0000:db:00.0, 1.24.1-b336d5e, 01P4-HL3090A0-18-UAH079-13-03-03, 4, 131072 MiB, \
130400 MiB, 672 MiB
"""

GAUDI_CSV = """\
name, uuid, power.draw [W], temperature.aip [C], utilization.aip [%], memory.used [MiB], \
memory.total [MiB]
HL-205, 00P1-HL2000A1-14-P64X00-16-07-11, 102, 29, 14, 512, 32768
HL-205, 00P1-HL2000A1-14-P64W98-10-03-11, 103, 32, 15, 512, 32768
HL-205, 00P1-HL2000A1-14-P64W98-05-02-04, 103, 30, 14, 512, 32768
HL-205, 00P1-HL2000A1-14-P64X78-02-07-10, 96, 31, 12, 512, 32768
"""
