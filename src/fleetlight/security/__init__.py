# SPDX-License-Identifier: Apache-2.0
"""TLS between the processes of a job: the certificates, and how a refusal is put into words."""
