# SPDX-License-Identifier: Apache-2.0
"""`RowTable`: rows by id, and the kernels that find and update them."""
