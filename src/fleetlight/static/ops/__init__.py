# SPDX-License-Identifier: Apache-2.0
"""Operations of our own that stand in the graphs of programs."""
