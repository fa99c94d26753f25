import org.apache.spark.sql.{DataFrame, Encoder, Encoders, Row}
import org.apache.spark.sql.streaming._

/** A processor of the JVM with a value, a list and a map for each word: Real-Time Mode has no processors in Python. */
class RealTimeProcessor extends StatefulProcessor[String, Row, String] {
  private implicit val text: Encoder[String] = Encoders.STRING
  private implicit val number: Encoder[Long] = Encoders.scalaLong
  @transient private var last: ValueState[Long] = _
  @transient private var sides: ListState[String] = _
  @transient private var counts: MapState[String, Long] = _

  override def init(mode: OutputMode, time: TimeMode): Unit = {
    last = getHandle.getValueState[Long]("last", number, TTLConfig.NONE)
    sides = getHandle.getListState[String]("sides", text, TTLConfig.NONE)
    counts = getHandle.getMapState[String, Long]("counts", text, number, TTLConfig.NONE)
  }

  override def handleInputRows(word: String, rows: Iterator[Row], timers: TimerValues): Iterator[String] = {
    rows.foreach { row =>
      val (side, number) = (row.getAs[String]("side"), row.getAs[Long]("number"))
      last.update(number)
      sides.appendValue(side)
      counts.updateValue(side, if (counts.containsKey(side)) counts.getValue(side) + 1 else 1L)
      if (number == 7) last.clear()
      if (number == 11) sides.clear()
    }
    Iterator.single(word)
  }
}

object RealTimeProcessor {
  def of(rows: DataFrame): DataFrame =
    rows.groupByKey((row: Row) => String.valueOf(row.getAs[String]("word")))(Encoders.STRING)
      .transformWithState(new RealTimeProcessor, TimeMode.None(), OutputMode.Update())(Encoders.STRING)
      .toDF("word")
}
