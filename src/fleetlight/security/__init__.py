# SPDX-License-Identifier: Apache-2.0
"""TLS between the processes of a job: certificates, contexts and errors; and the job's token.

`security` is TLS between processes, and the token of a job. `certificates.py` makes the files and
`certificate_folder.py` finds the file that is wrong. `x509.py` reads certificates and revocation
lists, `context.py` loads them, and `handshake_check.py` checks that they fit together.
`tls_errors.py` explains OpenSSL's errors. `token.py` proves to servers and doctors that a process
knows the token. A `ProofExchange` carries the messages of the proof; the `Secret` itself is in
roles.
"""
