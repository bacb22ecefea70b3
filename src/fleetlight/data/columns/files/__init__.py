# SPDX-License-Identifier: Apache-2.0
"""Files of records in groups, one format a file."""
