# SPDX-License-Identifier: Apache-2.0
"""Workers that train alone for some steps and then average what each has learned."""
