# SPDX-License-Identifier: Apache-2.0
"""Public functions over the current job."""
