# SPDX-License-Identifier: Apache-2.0
"""Answers the workers' messages: the deciding parts are pure, one place waits."""
