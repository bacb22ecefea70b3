# SPDX-License-Identifier: Apache-2.0
"""The processes of one machine: started, followed, watched and ended, with nothing left behind."""
