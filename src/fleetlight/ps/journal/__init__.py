# SPDX-License-Identifier: Apache-2.0
"""What a server writes down before it says that something was done."""
