# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of a job: who belongs to it, and where its servers listen."""
