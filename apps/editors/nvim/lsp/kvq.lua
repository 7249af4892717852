-- For vim.lsp.enable('kvq') without kvq's setup(), Neovim 0.11 and later.
return { cmd = { 'kvq', 'lsp' } }
