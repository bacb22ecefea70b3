# SPDX-License-Identifier: Apache-2.0
"""TLS between the processes of a job: certificates, contexts and errors; and the job's token."""
