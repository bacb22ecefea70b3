# SPDX-License-Identifier: Apache-2.0
"""`RowTable`: rows by id, which learn by a rule."""
