# What both programs share: the address, the lines of their steps, and requests to the runner.
$stdout.sync = true

PLACE, HOST, PORT = ENV.values_at('PLACE', 'REDIS_HOST', 'REDIS_PORT')
# How many texts the states have: job:text:000 to job:text:299, each with its number.
TEXTS = 300
# Longer than any wait on a busy machine; it ends a hang.
WAIT_S_MAX = 120

def text(number)
  format('job:text:%03d', number)
end

# Print what a step returns, or its error.
def step(name)
  result = begin
    yield.inspect
  rescue StandardError => e
    "#{e.class}: #{e.message}".sub(/(127\.0\.0\.1:)\d+/, '\\1PORT').sub(/NOPERM .*/, 'NOPERM')
  end
  puts "#{name}: #{result}"
end

# Ask the runner to put or delete a state's key; wait until it is done.
def ask(*words)
  puts "! #{words.join(' ')}"
  $stdin.gets or raise 'the runner has ended'
end

# Call until the result is the expected one; errors meanwhile are no results.
def until_equal(expected)
  (WAIT_S_MAX * 100).times do
    found = begin
      yield
    rescue Redis::BaseError => e
      e.message
    end
    return found if found == expected

    sleep 0.01
  end
  raise 'the result stays another'
end
