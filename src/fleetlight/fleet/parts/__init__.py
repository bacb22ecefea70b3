# SPDX-License-Identifier: Apache-2.0
"""What a job is made of, none of which knows the job."""
