# SPDX-License-Identifier: Apache-2.0
"""A process group inside TLS: Gloo and NCCL cannot encrypt."""
