"""Which instance: prefix index, filters, scorers, pickers, and the policies made of them."""
