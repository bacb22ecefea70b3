# SPDX-License-Identifier: Apache-2.0
"""Connections with deadlines, plain or inside TLS; tunnels; the sockets of a process.

`wire` is a connection with deadlines. `plain.py` has `Wire`, a connected socket whose every wait
has a deadline. `tls.py` has `TlsWire`, which passes all bytes through OpenSSL. `tunnel.py`
carries plain connections of other programs, such as torch's store, inside TLS. `shared_memory.py`
makes and passes memory that processes of one host share. `listening.py` listens at the address by
which the members of a job know a machine. `descriptors.py` lists the sockets of the process;
`forking.py` closes the job's sockets in forked children.
"""
