# SPDX-License-Identifier: Apache-2.0
"""Commands about what jobs have stored."""
