# SPDX-License-Identifier: Apache-2.0
"""A worker's side: splitting requests among the servers, and when to ask."""
