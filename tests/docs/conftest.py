"""The pages of the documentation are opened in a browser."""

from tests.browser import chromium as chromium
