# SPDX-License-Identifier: Apache-2.0
"""The files of tables that are larger than memory."""
