# SPDX-License-Identifier: Apache-2.0
"""The same training job written for each system that is compared."""
