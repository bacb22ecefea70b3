# SPDX-License-Identifier: Apache-2.0
"""Workers join and leave while the job runs."""
