# SPDX-License-Identifier: Apache-2.0
"""Start, supervise and end the processes of one machine, without leaving any behind."""
