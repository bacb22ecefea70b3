# SPDX-License-Identifier: Apache-2.0
"""The meeting point of a job: who belongs to it, and where its servers listen."""
