# SPDX-License-Identifier: Apache-2.0
"""Components of a job that do not depend on the job."""
