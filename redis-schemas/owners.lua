-- Who owns this block? The live workers that claim it: for an operator who has the hash from $kvgate_chain.
--
-- KEYS[1]  kvgate:{model}:meta
-- ARGV[1]  the block's hash, 32 hex digits (the first 20 suffice). A hash names its whole prefix, so whoever owns the last
--          block of a prompt owns all of it
--
-- Reply    a line 'worker addr lease' for each, ordered by worker id; empty when nobody owns it; an error where that is no hash
--
-- Reads only.

local base = string.sub(KEYS[1], 1, -5)
local hash = string.lower(ARGV[1] or '')
if #hash < 20 or string.find(hash, '%X') then
    return redis.error_reply('"' .. string.sub(hash, 1, 40) .. '" is no block hash: 32 hex digits (at least the first 20), as $kvgate_chain in the access log has them')
end
local list = redis.call('HGET', base .. 'own:' .. string.sub(hash, 1, 4), string.sub(hash, 5, 20)) or ''
local owners = {}
for lease in string.gmatch(list, '%d+') do
    local named = redis.call('HGET', base .. 'leases', lease)
    if named then
        local id = string.match(named, '^%S*')
        local w = redis.pcall('HMGET', base .. 'w:' .. id, 'lease', 'addr')
        if w[1] == lease then
            owners[#owners + 1] = id .. ' ' .. w[2] .. ' ' .. lease
        end
    end
end
table.sort(owners)
return owners
