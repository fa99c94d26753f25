# redis-rb: requests, pipelines, transactions with WATCH, scripts, messages; the cluster client.
require 'redis'
require_relative 'steps'

def connected
  options = { host: HOST, port: PORT, timeout: WAIT_S_MAX }
  if PLACE == 'tls'
    options.update(ssl: true, ssl_params: { ca_file: ENV['REDIS_CA'] })
    options.update(username: ENV['REDIS_USER'], password: ENV['REDIS_PASSWORD'])
  end
  Redis.new(**options)
end

def texts(client)
  step('GET') { client.get(text(7)) }
  step('a missing key') { client.get('job:text:none') }
  step('MGET') { client.mget(text(1), 'job:text:none', text(299)) }
  step('STRLEN') { client.strlen('job:text:long') }
  step('a pipeline') { client.pipelined { |pipeline| TEXTS.times { |number| pipeline.get(text(number)) } } }
  step('EXISTS, TYPE, TTL') { [client.exists?(text(7)), client.type(text(7)), client.ttl(text(7))] }
  step('WRONGTYPE') { client.hgetall(text(7)) }
  step('a key of others') { client.hlen('job:map:flight') }
  return if PLACE == 'upstream'

  step('a refused write') { client.set(text(7), 'x') }
  step('a read after it') { client.get(text(7)) }
  step('a refused transaction') { client.multi { |transaction| transaction.set(text(7), 'x') } }
end

def reads(client)
  step('HGETALL') { client.hgetall('job:map:flight').sort }
  step('HSCAN') { client.hscan_each('job:map:large').map(&:first).uniq.size }
  step('LRANGE') { client.lrange('job:list:alerts', 0, -1) }
  step('SMEMBERS') { client.smembers('job:set:airports').sort }
  step('ZRANGE') { client.zrange('job:ranks:delays', 0, -1, with_scores: true) }
  step('SCAN') { client.scan_each(match: 'job:text:1*', count: 1000).to_a.uniq.sort }
  step('MULTI') do
    client.multi do |transaction|
      transaction.get(text(7))
      transaction.hget('job:map:flight', 'to')
      transaction.lrange('job:list:alerts', 0, 0)
    end
  end
end

# Subscribe, and return the messages; the block is called with the number of messages so far, until there are as many as wanted.
def messages(channel, wanted)
  found = []
  connected.subscribe(channel) do |on|
    on.subscribe { yield 0 }
    on.message do |_, message|
      found << message
      found.size == wanted ? throw(:enough) : yield(found.size)
    end
  end
rescue UncaughtThrowError
  found
end

# What a client notices when a state changes: a watched key, a notification.
def changes(client)
  step('WATCH') do
    ask('put', 'job:text:watched', '1')
    [true, false].map do |is_changed|
      client.watch('job:text:watched') do
        ask('put', 'job:text:watched', '2') if is_changed
        client.multi { |transaction| transaction.get('job:text:watched') }
      end
    end
  end
  step('keyspace notifications') do
    messages('__keyspace@0__:job:text:live', 2) do |count|
      count.zero? ? ask('put', 'job:text:live', '1') : ask('delete', 'job:text:live')
    end
  end
  step('after its connection was killed') do
    [connected.call(['CLIENT', 'KILL', 'ID', client.call(%w[CLIENT ID])]), client.get(text(7))]
  end
end

def writes(client)
  step('SET, GET') { [client.set('own:text', 'a'), client.get('own:text')] }
  step('SET NX PX') { [client.set('own:lock', 'me', nx: true, px: 60_000), client.set('own:lock', 'you', nx: true), client.del('own:lock')] }
  step('hashes, lists, sets') do
    [client.hset('own:map', 'f', 'v'), client.hincrby('own:map', 'n', 5), client.rpush('own:list', %w[a b]),
     client.blpop('own:list', timeout: 1), client.sadd('own:set', %w[x y]), client.zadd('own:ranks', 1.5, 'a')]
  end
  step('keys of both') { client.mget('own:text', text(7), 'none') }
  step('MULTI of both') do
    client.multi do |transaction|
      transaction.incr('own:counter')
      transaction.get(text(7))
      transaction.set('own:text', 'b')
    end
  end
  step("WATCH of one's own") do
    lost = client.watch('own:text') do
      connected.set('own:text', 'c')
      client.multi { |transaction| transaction.set('own:text', 'lost') }
    end
    [lost, client.get('own:text')]
  end
  step('a script') { client.eval("redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])", ['own:text'], ['d']) }
  step('a stream') do
    [client.xgroup(:create, 'own:stream', 'group', '0', mkstream: true), client.xadd('own:stream', { f: 'v' }, id: '1-1'),
     client.xreadgroup('group', 'me', 'own:stream', '>'), client.xack('own:stream', 'group', '1-1')]
  end
  step('messages') { messages('own:channel', 1) { client.publish('own:channel', 'hello') } }
  step('DEL') { client.del('own:text', 'own:map', 'own:list', 'own:set', 'own:ranks', 'own:counter', 'own:stream') }
end

def cluster
  client = Redis.new(cluster: ["redis://#{HOST}:#{PORT}"], timeout: WAIT_S_MAX)
  all = -> { Array.new(TEXTS) { |number| client.get(text(number)) } }
  expected = all.call
  step('texts of all slots') { all.call }
  step('a map') { client.hgetall('job:map:flight').sort }
  step('a pipeline of one slot') { client.pipelined { |pipeline| 2.times { pipeline.get(text(7)) } } }
  step('MULTI') { client.multi { |transaction| transaction.get(text(7)) } }
  ask('kill', text(7))
  step("after a server's end") { until_equal(expected, &all) }
  ask('put', 'job:text:live', '2')
  step('a new value after it') { until_equal('2') { client.get('job:text:live') } }
end

if PLACE == 'cluster'
  cluster
  exit
end
client = connected
texts(client)
unless PLACE == 'tls'
  reads(client)
  changes(client)
end
writes(client) if PLACE == 'upstream'
