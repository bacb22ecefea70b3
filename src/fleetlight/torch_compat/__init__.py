# SPDX-License-Identifier: Apache-2.0
"""The names of torch that torch does not promise to keep, and those that some versions lack.

No other package uses a private name of torch (tests/test_tidy.py checks it). Each file covers one
area and says for each name why Fleetlight needs it and what does the work where torch lacks it.
tests/torch_compat has a test of the behaviour that Fleetlight relies on, for each name. Import the
file you need: some of them take long to load.
"""
