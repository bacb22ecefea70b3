# SPDX-License-Identifier: Apache-2.0
"""Private names of torch, and names that some versions of torch lack.

No other package uses a private name of torch (tests/test_torch_names.py checks that). Each file
covers one area, and says why Fleetlight needs each name and what replaces it in a torch without it.
tests/torch_compat tests the behaviour that Fleetlight relies on, for each name. Import only the
file you need: some of them load slowly.
"""
