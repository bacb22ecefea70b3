# SPDX-License-Identifier: Apache-2.0
"""The public functions over one context: the only place that knows every part."""
