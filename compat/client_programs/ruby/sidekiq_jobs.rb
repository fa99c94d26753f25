# Sidekiq: jobs that read states, in a process of workers: retries, delays, statistics.
require 'sidekiq'
require 'sidekiq/api'
require_relative 'steps'

ADDRESS = { url: "redis://#{HOST}:#{PORT}/0" }.freeze
Sidekiq.configure_client { |config| config.redis = ADDRESS }
Sidekiq.configure_server do |config|
  config.redis = ADDRESS
  config.options[:poll_interval_average] = 0.1
end

# Reads a text, whose number is its value.
class ReadJob
  include Sidekiq::Job

  def perform(number)
    Sidekiq.redis do |client|
      value = client.get(text(number))
      client.sadd(value == number.to_s ? 'own:right' : 'own:wrong', number)
    end
  end
end

# Fails the first time.
class FailingJob
  include Sidekiq::Job
  sidekiq_options retry: 5
  sidekiq_retry_in { 0 }

  def perform
    raise 'the first try' if Sidekiq.redis { |client| client.incr('own:tries') } == 1
  end
end

def main
  redis = Redis.new(**ADDRESS)
  step('jobs before there is a worker') do
    Sidekiq::Client.push_bulk('class' => ReadJob, 'args' => (0...TEXTS).map { |number| [number] })
    FailingJob.perform_async
    ReadJob.perform_in(0.5, 7)
    [Sidekiq::Queue.new.size, Sidekiq::ScheduledSet.new.size]
  end
  worker = spawn('sidekiq', '--require', __FILE__, '--concurrency', '5', out: File::NULL, err: File::NULL)
  step('all states are read') { until_equal(TEXTS) { redis.scard('own:right') } }
  step('a failed job is tried again') { until_equal('2') { redis.get('own:tries') } }
  step('statistics') do
    until_equal([TEXTS + 3, 1, 0, 0, 0]) do
      found = Sidekiq::Stats.new
      [found.processed, found.failed, found.enqueued, found.scheduled_size, found.retry_size]
    end
  end
  step('processes of workers') { Sidekiq::ProcessSet.new.size }
  Process.kill('TERM', worker)
  Process.wait(worker)
  step('processes after their end') { Sidekiq::ProcessSet.new.size }
  step('wrong values') { redis.scard('own:wrong') }
end

main if $PROGRAM_NAME == __FILE__
