<?php
// What both programs share: the address, the lines of their steps, and requests to the runner.

define('PLACE', getenv('PLACE'));
define('HOST', getenv('REDIS_HOST'));
define('PORT', (int) getenv('REDIS_PORT'));
define('USER', getenv('REDIS_USER'));
define('PASSWORD', getenv('REDIS_PASSWORD'));
define('CA', getenv('REDIS_CA'));

// How many texts the states have: job:text:000 to job:text:299, each with its number.
const TEXTS = 300;
// Longer than any wait on a busy machine; it ends a hang.
const WAIT_S_MAX = 120;

function text(int $number): string
{
    return sprintf('job:text:%03d', $number);
}

function all_texts(): array
{
    return array_map('text', range(0, TEXTS - 1));
}

/** Print what a step returns, or its error. */
function step(string $name, callable $body): void
{
    try {
        $result = json_encode($body(), JSON_UNESCAPED_UNICODE | JSON_UNESCAPED_SLASHES);
    } catch (Throwable $error) {
        $result = get_class($error) . ': ' . $error->getMessage();
        $result = preg_replace(['/(127\.0\.0\.1:)\d+/', '/NOPERM .*/'], ['${1}PORT', 'NOPERM'], $result);
    }
    echo $name, ': ', str_replace("\n", '\n', $result), "\n";
}

/** Ask the runner to put or delete a state's key, or to kill the server that has a key; wait until it is done. */
function ask(string ...$words): void
{
    echo '! ', implode(' ', $words), "\n";
    if (fgets(STDIN) === false) {
        throw new RuntimeException('the runner has ended');
    }
}

/** Call until the result is the expected one; errors meanwhile are no results. */
function until_equal(callable $find, $expected)
{
    for ($end = microtime(true) + WAIT_S_MAX; microtime(true) < $end; usleep(10000)) {
        try {
            $found = $find();
            if ($found === $expected) {
                return $found;
            }
        } catch (Exception $error) {
            $found = $error->getMessage();
        }
    }
    throw new RuntimeException('still ' . json_encode($found));
}

function sorted(array $items): array
{
    array_is_list($items) ? sort($items) : ksort($items);
    return $items;
}
