# SPDX-License-Identifier: Apache-2.0
"""Private names of torch, and names that some versions of torch lack.

No other package uses a private name of torch (tests/test_torch_names.py checks that). Each file
covers one area, and says why Fleetlight needs each name and what replaces it in a torch without
it. tests/torch_compat tests the behaviour that Fleetlight relies on, for each name. Import only
the file you need: some of them load slowly.

`torch_compat` has every use of a private name of torch, one file an area, and substitutes for
versions of torch that lack a name. Each name has a reason there and a test of its own;
`tests/test_tidy.py` refuses private names elsewhere. `compiler/lazy_dynamo.py` keeps torch's
compiler out of a process until the script compiles something. Torch's optimizers load it to
exclude their steps, which takes more than a second and 80 MiB. `fleet.init` postpones that; steps
of registered optimizers and of servers do not load it. `profiling.py` runs torch's profiler for a
trace, and ends it before one of the script begins.
"""
