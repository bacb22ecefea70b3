# SPDX-License-Identifier: Apache-2.0
"""A process group whose workers talk to each other inside TLS: Gloo and NCCL cannot encrypt."""
