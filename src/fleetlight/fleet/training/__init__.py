# SPDX-License-Identifier: Apache-2.0
"""A registered model, a registered optimizer, and what every kind of job does with them."""
